"""Load generation: workloads, datasets, traces and arrival times."""
