"""Engine clients: the engine in this process, or in another one over a pair of sockets."""
