"""What can be measured about a network modulo its scales: `diagnostics`, `flatness`."""
