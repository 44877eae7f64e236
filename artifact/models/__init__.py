"""Language models: their shapes, prompts for them, and decode traces recorded from them."""
