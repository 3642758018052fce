// Extension of pi: adds the provider "mlxcache", which `mlxcache launch pi` describes in a variable.
export default (pi) => pi.registerProvider("mlxcache", JSON.parse(process.env.PI_MLXCACHE_PROVIDER));
