"""Keys of a federation: its authority, the kits of its members, and who is a member now."""
