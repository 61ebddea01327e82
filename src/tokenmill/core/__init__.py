"""The contracts that all sides speak: requests, sampling parameters, plans and results, messages, errors."""
