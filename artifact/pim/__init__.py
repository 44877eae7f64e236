"""The memory side of the study: geometry, address maps and the bandwidth a placement gets."""
