"""Building blocks shared by methods. Methods import these modules, and never each other."""
