"""Who is sent out and who comes back in a run with delays."""

from unskew.simulation.network import Network


class Arrivals:
    """Remembers which clients were sent out and which came back, by round."""

    def __init__(self, monkeypatch):
        self.out, self.back = {}, {}
        real = Network.deliver

        def deliver(network, round, results):
            results = list(results)
            self.out[round] = [u.client for u in results]
            arrived = list(real(network, round, results))
            self.back[round] = [(u.origin_round, u.client) for u in arrived]
            return iter(arrived)

        monkeypatch.setattr(Network, "deliver", deliver)
