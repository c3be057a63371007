// Would catch: a variable that is written wrong and passed over in silence, one of another verb that keeps a program
// from starting, and a pod that does not start beside a service called terrace.
#include "base/environment.h"

#include <gtest/gtest.h>

namespace terrace::config {
namespace {

// What is wrong with one variable; "" if nothing.
std::string Check(const std::string& variable) {
  const std::vector<Schema> schemas = {
      {.program = "terrace serve", .options = {{.name = "ram"}, {.name = "port"}, {.name = "shared"}}},
      {.program = "terrace router", .options = {{.name = "static-backends"}}}};
  const auto checked = CheckVariables({"PATH=/bin", "LMCACHE_X=1", variable}, schemas, {"TERRACE_CACHE"});
  return checked ? "" : checked.error().what;
}

TEST(Environment, VariableThatNobodyReadsNamesTheNearest) {
  EXPECT_EQ(Check("TERRACE_SHRAED=/kv"),
            "unknown variable TERRACE_SHRAED in the environment; did you mean TERRACE_SHARED?");
  EXPECT_EQ(Check("TERRACE_STATIC_BACKEND=x"),
            "unknown variable TERRACE_STATIC_BACKEND in the environment; did you mean TERRACE_STATIC_BACKENDS?");
  EXPECT_EQ(Check("TERRACE_FAVOURITE_COLOUR=red"),
            "unknown variable TERRACE_FAVOURITE_COLOUR in the environment; unset it, or see --help");
  EXPECT_NE(Check("TERRACE_=1"), "");
}

TEST(Environment, VariablesOfAllVerbsAndOfScriptsAreKnown) {
  for (const char* known : {"TERRACE_RAM=1GiB", "TERRACE_STATIC_BACKENDS=x", "TERRACE_CONFIG_FILE=f",
                            "TERRACE_CACHE=/c", "TERRACE_RMA=", "TERRACE_RMA", "TERRACED=1", "terrace_rma=1"}) {
    EXPECT_EQ(Check(known), "") << known;
  }
}

TEST(Environment, WhatKubernetesSetsForAServiceIsPassedOver) {
  for (const char* set :
       {"TERRACE_SERVICE_HOST=10.0.0.7", "TERRACE_SERVICE_PORT=80", "TERRACE_SERVICE_PORT_HTTP=80",
        "TERRACE_PORT=tcp://10.0.0.7:80", "TERRACE_PORT_80_TCP=tcp://10.0.0.7:80", "TERRACE_PORT_80_TCP_PROTO=tcp",
        "TERRACE_PORT_80_TCP_PORT=80", "TERRACE_PORT_80_TCP_ADDR=10.0.0.7", "TERRACE_ROUTER_SERVICE_HOST=10.0.0.7",
        "TERRACE_ROUTER_PORT=tcp://10.0.0.7:80", "TERRACE_ROUTER_PORT_53_UDP_ADDR=10.0.0.7"}) {
    EXPECT_EQ(Check(set), "") << set;
  }
  EXPECT_NE(Check("TERRACE_PROT=80"), "");
  EXPECT_NE(Check("TERRACE_ROUTER_PORT=80"), "");
}

TEST(Environment, PortOfAKubernetesServiceIsNotOurs) {
  const Schema schema = {.program = "p", .options = {{.name = "port", .type = Type::kInt, .default_value = "8000"}}};
  const auto load = [&](const std::string& value) {
    return Load(schema, {}, [&](const std::string& name) {
      return name == "TERRACE_PORT" ? std::optional<std::string>(value) : std::nullopt;
    });
  };
  EXPECT_EQ(load("tcp://10.0.0.7:80")->values.Int("port"), 8000);
  EXPECT_EQ(load("81")->values.Int("port"), 81);
  EXPECT_FALSE(load("eighty"));
}

}  // namespace
}  // namespace terrace::config
