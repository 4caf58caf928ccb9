"""Generated from proto/kvstore/v1 by `make proto`. Do not edit."""
