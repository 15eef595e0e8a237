"""Everything that a run resumes from, on disk."""
