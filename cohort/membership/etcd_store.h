#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/membership/etcd_options.h"
#include "cohort/membership/record_store.h"

/// The record of a run in etcd: any host may die, that of an agent and that of a minority of etcd's members.
/// No LibTorch.
///
///     membership::EtcdOptions options;
///     options.endpoints = membership::parse_etcd_endpoints("e1:2379,e2:2379,e3:2379");
///     options.run_id = "vgg-17";
///     membership::Member member({.settings = settings, .listen = "0.0.0.0:0", .secret = secret,
///                                .store = membership::make_etcd_store(options)});
namespace cohort::membership {

/// Reads "host:port[,host:port...]"; without a port it is etcd's, 2379; IPv6 as "[::1]:2379". Throws:
/// UsageError.
std::vector<std::string> parse_etcd_endpoints(std::string_view text);

/// Why there can be no such store here: this build has no libcurl. Empty where there can.
std::string etcd_absent();

/// A store that all agents with the same endpoints, prefix and run id share. Does not wait for etcd: it tries
/// again until etcd answers, and the log says what is wrong, once for each change. The record of a run that
/// has ended is kept for a minute. Has a thread of its own. Throws: UsageError for options that cannot be,
/// and where etcd_absent().
std::shared_ptr<RecordStore> make_etcd_store(EtcdOptions options);

}  // namespace cohort::membership
