"""Does an environment import, and compute right?"""
