"""What is loaded inside an environment under test, where this folder is on sys.path."""
