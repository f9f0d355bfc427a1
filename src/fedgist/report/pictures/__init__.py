"""Studies as pictures: what they show, how it is drawn, and how rows look."""
