"""What a family of methods shares. Methods import it, and never each other."""
