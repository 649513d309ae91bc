"""Sizing without the hardware: a catalogue, a cost model, the schedulers under a virtual clock, and a planner."""
