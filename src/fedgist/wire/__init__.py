"""How a site is asked over a wire: envelopes, the site itself, and the engines that ask it."""
