"""The frozen LLM behind two protocols: what a head needs, and what decoding needs."""
