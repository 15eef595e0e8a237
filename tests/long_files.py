"""Test files that take long, in the order in which they start."""

LONGEST = (
    "test_examples", "test_chapters", "test_compile", "test_explain", "test_distributed",
    "test_report", "test_hostile", "test_model_explanation", "test_tuning", "test_faithfulness",
    "test_callbacks", "test_train", "test_user_code", "test_auto", "test_resume", "test_run_log",
    "test_round_trips", "test_guides", "test_readme", "test_measurements", "test_object_runs",
    "test_launch", "test_distillation", "test_public_face", "test_missing_images",
    "test_google_flax", "test_same_bits", "test_commands", "test_mistakes", "test_presets",
    "test_save_faults", "test_run_figures", "test_defaults",
    "test_timm", "test_loader",
    "test_initial_weights", "test_confusion_figure", "test_timm_files", "test_features",
    "test_recipes", "test_activation_checkpointing", "test_progressive", "test_findings",
    "test_verify", "test_hints",
)  # fmt: skip
"""Files in which the tests take longest, in about this order; it need not be exact."""
