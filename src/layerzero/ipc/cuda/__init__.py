"""The CUDA driver, and memory and streams that two processes share."""
