"""The parts that models are made of; each pulls its own weights."""
