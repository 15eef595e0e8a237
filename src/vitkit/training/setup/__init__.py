"""From settings to a run before its first step: data, initial weights, folder, parts."""
