"""LayerZero in serving engines: `layerzero.engines.flashinfer`, `.vllm` and `.sglang`. Nothing of an engine is imported
before one of them is."""
