"""Operator's toolkit for hidden-state extraction on remote GPU hosts, over SSH."""
