"""Static audit of one library's use of another: source index, call sites, rules, findings. Nothing audited is imported."""
