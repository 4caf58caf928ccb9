"""Two nodes, real servers, that share two tiers."""
