"""SGLang's route: generate."""
