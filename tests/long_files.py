"""Test files that take long: the order in which they start, and where no coverage is measured."""

from __future__ import annotations

LONGEST = (
    "test_chapters", "test_compile", "test_distributed", "test_measurements", "test_hostile",
    "test_resume", "test_examples", "test_train", "test_round_trips", "test_launch",
    "test_readme", "test_google_flax", "test_presets", "test_timm", "test_run_log",
    "test_distillation", "test_commands", "test_auto", "test_timm_files", "test_initial_weights",
    "test_missing_images", "test_recipes", "test_findings", "test_activation_checkpointing",
    "test_loader", "test_verify", "test_hints", "test_save_faults", "test_features",
)  # fmt: skip
"""Files in which the tests take longest, in about this order; it need not be exact."""
UNMEASURED = {"test_chapters", "test_readme", "test_round_trips", "test_presets"}
"""Long files that run what others test part by part: with coverage they take half as long again."""
