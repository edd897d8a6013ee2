"""The parts of a rank, made from settings: device, model, attention, memory, steps, speculation."""
