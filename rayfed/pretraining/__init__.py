"""Train the networks that attacks, defences and metrics need before a run: generators, evaluators, policies."""
