"""Static audit of one library's use of another: source index, call sites, rules, findings. Imports nothing it audits."""
