"""Two works on the KV cache in LLM decoding, PRR and KV-PIMple, as one reproducible artifact."""

__version__ = "0.1.0"
