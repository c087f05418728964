"""Workers as processes, and the machine that they run on."""
