"""The worker half of KV transfers: host rows, files, and the copies between them and the blocks of the device."""
