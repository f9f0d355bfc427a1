"""A real federation: keys, certificates and kits of its server, administrators and sites."""
