"""Where the time of a bundle goes, what its fusions gain, and which way to decode wins."""
