"""Kernels of the HF Kernel Hub: pinned by revision and file hashes, signed, and copied into an environment"""
