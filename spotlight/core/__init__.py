"""Pure decisions: no I/O, no clock, no torch, ray or sky; (state, event, now, rng) in, commands out."""
