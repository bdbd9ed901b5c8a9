"""Virtual time: the same core objects, driven by an event heap."""
