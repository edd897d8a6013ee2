"""What the server shows of itself: accounts of requests, metrics, receipts, logs, traces, live view."""
