"""FedGWC, and what its server makes of losses."""
