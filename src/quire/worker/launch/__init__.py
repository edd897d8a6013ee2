"""Launchers: captured steps on a GPU and on a CPU, and factories of both."""
