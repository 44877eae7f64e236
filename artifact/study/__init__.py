"""The study: what is run, what is written, what is claimed of it and how it is shown."""
