"""What processes share: arenas, and the pages of lanes, rings and timelines."""
