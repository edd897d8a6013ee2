"""What engines are asked, and when: workloads, datasets, traces, arrival times."""
