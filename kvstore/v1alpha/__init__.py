"""Generated from proto/kvstore/v1alpha by `make proto`. Do not edit."""
