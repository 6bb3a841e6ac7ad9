"""Static audit of one library's use of another: index, call sites, rules, findings. Nothing audited is imported."""
