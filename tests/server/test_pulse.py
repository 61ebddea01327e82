from tokenmill.server.pulse import SILENCE_SECONDS, Pulse


def test_silence_is_trouble_only_while_requests_are_open():
    now = [100.0]
    pulse = Pulse(lambda: now[0])
    now[0] += SILENCE_SECONDS
    assert pulse.trouble(3) is None
    now[0] += 1
    assert pulse.trouble(0) is None
    assert pulse.trouble(3) == "3 requests are open, but nothing was heard from the engine for 121 seconds"
    pulse.beat()
    assert pulse.trouble(3) is None
