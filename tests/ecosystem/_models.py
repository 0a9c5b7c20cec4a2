"""Graphs, densities, agents, kernels and losses."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.ecosystem._programs import Made, Numbers, Registry, cross_entropy, scalar

MODELS = Registry()


@MODELS.add("jraph")
def jraph_graph_network() -> Made:
    jraph, numbers = import_module("jraph"), Numbers()

    def loss(params: Any, nodes: Any, edges: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        def layer(name: str) -> Any:
            return lambda *parts: jax.nn.relu(jnp.concatenate(parts, -1) @ params[name])

        graph = jraph.GraphsTuple(
            nodes=nodes,
            edges=edges,
            senders=senders,
            receivers=receivers,
            n_node=jnp.asarray([20]),
            n_edge=jnp.asarray([60]),
            globals=jnp.ones((1, 4)),
        )
        graph = jraph.GraphNetwork(
            update_edge_fn=layer("edge"),
            update_node_fn=layer("node"),
            update_global_fn=layer("global"),
        )(graph)
        graph = jraph.GAT(
            lambda nodes: nodes @ params["query"],
            lambda sent, received, _: jax.nn.leaky_relu(
                jnp.concatenate([sent, received], -1) @ params["attend"]
            ),
            lambda nodes: nodes @ params["out"],
        )(graph)
        return cross_entropy(graph.nodes, labels)

    shapes = {
        "edge": (28, 8),
        "node": (28, 8),
        "global": (20, 4),
        "query": (8, 16),
        "attend": (32, 1),
        "out": (16, 5),
    }
    params = {name: numbers.normal(*shape, scale=0.25) for name, shape in shapes.items()}
    ends = numbers.integers(20, 60), numbers.integers(20, 60)
    data = numbers.normal(20, 8), numbers.normal(60, 8), *ends, numbers.integers(5, 20)
    return loss, params, data


@MODELS.add("e3nn-jax", "e3nn_jax")
def e3nn_tensor_product() -> Made:
    e3, numbers = import_module("e3nn_jax"), Numbers()

    def loss(params: Any, positions: jax.Array, senders: Any, receivers: Any) -> jax.Array:
        vectors = e3.IrrepsArray("1o", positions[receivers] - positions[senders])
        harmonics = e3.spherical_harmonics("0e+1o+2e", vectors, True)
        scalars = e3.IrrepsArray("8x0e", jax.nn.relu(positions @ params["in"]))
        messages = e3.tensor_product(scalars[senders], harmonics).filter("0e+1o+2e")
        messages = e3.concatenate([messages]).regroup()
        even = messages.filter("0e").array @ params["w"]
        summed = jax.ops.segment_sum(even, receivers, num_segments=10)
        return jnp.mean(jnp.sum(e3.norm(messages.filter("1o")).array) + summed @ params["out"])

    params = {
        "in": numbers.normal(3, 8),
        "w": numbers.normal(8, 8, scale=0.3),
        "out": numbers.normal(8, 1),
    }
    receivers = (np.arange(30) % 10).astype(np.int32)
    return loss, params, (numbers.normal(10, 3), numbers.integers(10, 30), receivers)


@MODELS.add("brax")
def brax_ppo_loss() -> Made:
    losses = import_module("brax.training.agents.ppo.losses")
    networks = import_module("brax.training.agents.ppo.networks")
    types, numbers = import_module("brax.training.types"), Numbers()
    sizes = {"policy_hidden_layer_sizes": (32, 32), "value_hidden_layer_sizes": (32, 32)}
    network = networks.make_ppo_networks(12, 4, **sizes)
    params = losses.PPONetworkParams(
        policy=numbers.initialized(network.policy_network.init, jax.random.PRNGKey(0)),
        value=numbers.initialized(network.value_network.init, jax.random.PRNGKey(1)),
    )
    batch = (4, 6)
    policy_extras = {
        "raw_action": numbers.normal(*batch, 4),
        "log_prob": numbers.normal(*batch, scale=0.1) - np.float32(5),
        "distribution_params": numbers.normal(*batch, 8),
        "value": numbers.normal(*batch),
    }
    data = types.Transition(
        observation=numbers.normal(*batch, 12),
        action=numbers.normal(*batch, 4),
        reward=numbers.normal(*batch),
        discount=np.ones(batch, np.float32),
        next_observation=numbers.normal(*batch, 12),
        extras={
            "state_extras": {"truncation": np.zeros(batch, np.float32)},
            "policy_extras": policy_extras,
        },
    )

    def loss(params: Any, data: Any) -> Any:
        return losses.compute_ppo_loss(params, None, data, jax.random.PRNGKey(2), network)[0]

    return loss, params, (data,)


@MODELS.add("distrax")
def distrax_spline_flow() -> Made:
    distrax, numbers = import_module("distrax"), Numbers()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def coupling(number: int) -> Any:
            def conditioner(hidden: jax.Array) -> jax.Array:
                made = jnp.tanh(hidden @ params["in"][number]) @ params["out"][number]
                return made.reshape(*made.shape[:-1], 4, 13)

            return distrax.MaskedCoupling(
                mask=jnp.arange(4) % 2 == number,
                bijector=lambda knots: distrax.RationalQuadraticSpline(knots, -3.0, 3.0),
                conditioner=conditioner,
            )

        base = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        flow = distrax.Transformed(base, distrax.Chain([coupling(0), coupling(1)]))
        return -jnp.mean(flow.log_prob(x))

    params = {
        "in": [numbers.normal(4, 16, scale=0.4) for _ in range(2)],
        "out": [numbers.normal(16, 52, scale=0.1) for _ in range(2)],
    }
    return loss, params, (numbers.normal(16, 4),)


@MODELS.add("flowjax")
def flowjax_autoregressive_flow() -> Made:
    flows, paramax = import_module("flowjax.flows"), import_module("paramax")
    distributions, numbers = import_module("flowjax.distributions"), Numbers()
    flow = flows.masked_autoregressive_flow(
        jax.random.key(0),
        base_dist=distributions.Normal(jnp.zeros(4)),
        flow_layers=2,
        nn_width=16,
    )

    def loss(flow: Any, x: jax.Array) -> jax.Array:
        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return loss, flow, (numbers.normal(16, 4),)


def _regression(numpyro: Any, distributions: Any) -> Any:
    def model(x: jax.Array, y: jax.Array) -> None:
        normal = distributions.Normal(0, 1)
        first = numpyro.sample("first", normal.expand([8, 16]).to_event(2))
        second = numpyro.sample("second", normal.expand([16]).to_event(1))
        spread = numpyro.sample("spread", distributions.HalfNormal(1.0))
        mean = jnp.tanh(x @ first) @ second
        numpyro.sample("y", distributions.Normal(mean, spread), obs=y)

    return model


@MODELS.add("numpyro")
def numpyro_variational_inference() -> Made:
    numpyro, numbers = import_module("numpyro"), Numbers()
    infer = import_module("numpyro.infer")
    guides = import_module("numpyro.infer.autoguide")
    model = _regression(numpyro, import_module("numpyro.distributions"))
    guide, bound = guides.AutoNormal(model), infer.Trace_ELBO()
    data = numbers.normal(32, 8), numbers.normal(32)
    inference = infer.SVI(model, guide, numpyro.optim.Adam(1e-2), bound)
    params = inference.get_params(inference.init(jax.random.PRNGKey(0), *data))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return bound.loss(jax.random.PRNGKey(1), params, model, guide, x, y)

    return loss, params, data


@MODELS.add("numpyro")
def numpyro_potential_energy() -> Made:
    numpyro, numbers = import_module("numpyro"), Numbers()
    util = import_module("numpyro.infer.util")
    model = _regression(numpyro, import_module("numpyro.distributions"))
    data = numbers.normal(32, 8), numbers.normal(32)
    found = util.initialize_model(jax.random.PRNGKey(0), model, model_args=data, dynamic_args=True)

    def loss(unconstrained: Any, x: jax.Array, y: jax.Array) -> Any:
        return found.potential_fn(x, y)(unconstrained)

    return loss, found.param_info.z, data


@MODELS.add("tinygp")
def tinygp_matern() -> Made:
    tinygp, numbers = import_module("tinygp"), Numbers()

    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        kernel = tinygp.kernels.Matern32(jnp.exp(params["length"]))
        process = tinygp.GaussianProcess(
            jnp.exp(params["size"]) * kernel,
            jnp.tanh(x @ params["w"])[:, 0],
            diag=jnp.exp(params["noise"]),
        )
        return -process.log_probability(y)

    params = {"size": scalar(0), "length": scalar(0), "noise": scalar(-2)}
    return loss, {**params, "w": numbers.normal(4, 1)}, (numbers.normal(20, 4), numbers.normal(20))


@MODELS.add("ott-jax", "ott")
def ott_sinkhorn_divergence() -> Made:
    divergence = import_module("ott.tools.sinkhorn_divergence")
    numbers = Numbers()

    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        moved = jnp.tanh(x @ params["w"]) @ params["out"]
        return divergence.sinkdiv(moved, y, epsilon=0.1)[0]

    params = {"w": numbers.normal(8, 16, scale=0.3), "out": numbers.normal(16, 4, scale=0.3)}
    return loss, params, (numbers.normal(16, 8), numbers.normal(16, 4))


def _attention_params(numbers: Numbers, heads: int, size: int) -> dict[str, Any]:
    params = {name: numbers.normal(32, heads, size, scale=0.2) for name in "qkv"}
    return {**params, "out": numbers.normal(heads, size, 32, scale=0.2)}


def _projected(params: Any, x: jax.Array) -> list[jax.Array]:
    return [jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv"]


@MODELS.add("tokamax")
def tokamax_attention_and_glu() -> Made:
    tokamax, numbers = import_module("tokamax"), Numbers()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        attended = tokamax.dot_product_attention(
            *_projected(params, x), is_causal=True, implementation="xla"
        )
        hidden = jnp.einsum("btnh,nhd->btd", attended, params["out"]) + x
        hidden = tokamax.layer_norm(hidden, params["scale"], None, implementation="xla")
        made = tokamax.gated_linear_unit(
            hidden, params["w"], activation=jax.nn.silu, implementation="xla"
        )
        return jnp.mean(made**2)

    params = _attention_params(numbers, 2, 16)
    params |= {"scale": np.ones(32, np.float32), "w": numbers.normal(32, 2, 64, scale=0.2)}
    return loss, params, (numbers.normal(2, 16, 32),)


@MODELS.add("tokamax")
def tokamax_ragged_dot() -> Made:
    tokamax, numbers = import_module("tokamax"), Numbers()

    def loss(params: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
        hidden = tokamax.ragged_dot(x, params["a"], sizes, implementation="xla")
        made = tokamax.ragged_dot(jax.nn.relu(hidden), params["b"], sizes, implementation="xla")
        return jnp.mean(made**2)

    params = {"a": numbers.normal(4, 16, 32, scale=0.2), "b": numbers.normal(4, 32, 16, scale=0.2)}
    return loss, params, (numbers.normal(32, 16), np.asarray([8, 8, 10, 6], np.int32))


@MODELS.add("jax")
def jax_dot_product_attention() -> Made:
    numbers = Numbers()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        attended = jax.nn.dot_product_attention(*_projected(params, x), is_causal=True)
        return jnp.mean((jnp.einsum("btnh,nhd->btd", attended, params["out"]) - x) ** 2)

    return loss, _attention_params(numbers, 4, 8), (numbers.normal(4, 16, 32),)


@MODELS.add("optax")
def optax_ctc() -> Made:
    numbers = Numbers()

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jnp.tanh(x @ params["a"]) @ params["b"]
        padding = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
        return jnp.mean(optax.ctc_loss(logits, padding[0], labels, padding[1]))

    params = {"a": numbers.normal(16, 32, scale=0.25), "b": numbers.normal(32, 11, scale=0.2)}
    return loss, params, (numbers.normal(4, 20, 16), numbers.integers(11, 4, 6, low=1))


@MODELS.add("optax")
def optax_contrastive() -> Made:
    numbers = Numbers()

    def loss(params: Any, images: jax.Array, texts: jax.Array) -> jax.Array:
        def embedded(x: jax.Array, name: str) -> jax.Array:
            made = jax.nn.relu(x @ params[name][0]) @ params[name][1]
            return made / jnp.linalg.norm(made, axis=-1, keepdims=True)

        logits = embedded(images, "image") @ embedded(texts, "text").T
        logits = logits * jnp.exp(params["temperature"])
        labels = jnp.arange(len(images))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    params: dict[str, Any] = {
        name: [numbers.normal(32, 64, scale=0.2), numbers.normal(64, 32, scale=0.12)]
        for name in ("image", "text")
    }
    params["temperature"] = scalar(4.6)
    return loss, params, (numbers.normal(64, 32), numbers.normal(64, 32))
