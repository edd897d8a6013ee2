"""Disaggregated prefill: the prefill engines of a decode engine, as processes that it owns."""
