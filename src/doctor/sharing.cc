#include "doctor/sharing.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "doctor/bucket.h"
#include "io/http_client.h"

namespace terrace::doctor {
namespace {

using Json = nlohmann::json;
using std::chrono::steady_clock;

constexpr uint32_t kAnswerTokens = 16;
constexpr std::chrono::milliseconds kPause{100};  // Between two looks.
constexpr std::chrono::seconds kUnseenWait{5};    // For a server that does not tell what is saved.
constexpr int kRouterTurns = 2;                   // Requests through the router for each instance.
constexpr size_t kNamesMax = 100'000;             // Of a bucket: 100 calls.
constexpr uint32_t kContextDefault = 2048;        // Of a server that does not say.

// Words of one token in most vocabularies.
constexpr std::array kWords = {"time",  "people", "water", "house", "world", "place", "school", "number",
                               "night", "point",  "home",  "money", "story", "month", "right",  "study",
                               "book",  "word",   "side",  "kind",  "head",  "hour",  "friend", "power",
                               "game",  "line",   "end",   "law",   "car",   "city",  "name",   "team"};

struct Reply {
  int status = 0;
  Json body;            // Discarded if it is no JSON.
  std::string trouble;  // "" if an answer came.
  double ms = 0;
};

struct Answer {
  std::string text;
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;
  std::string by_tier;      // "ram 512, shared_fs 256"; "" if it is not told.
  uint64_t from_below = 0;  // Of those, from shared tiers.
  std::string miss_reason;
  double ms = 0;
};

uint64_t NumberAt(const Json& json, const char* pointer) {
  const Json::json_pointer at(pointer);
  return json.contains(at) && json[at].is_number_unsigned() ? json[at].get<uint64_t>() : 0;
}

std::string TextAt(const Json& json, const char* pointer) {
  const Json::json_pointer at(pointer);
  return json.contains(at) && json[at].is_string() ? json[at].get<std::string>() : "";
}

class Check {
 public:
  Check(const SharingCheck& check, const std::atomic<bool>& stop, Report& report)
      : check_(check),
        stop_(stop),
        report_(report),
        http_({.thread_name = "terrace-doctor", .ca_file = check.ca_file, .first_byte_timeout = check.answer_max}) {}

  SharingResult Run() {
    if (!Reach()) return result_;
    const std::string& first = check_.instances.empty() ? check_.router : check_.instances.front();
    prompt_ = MakePrompt();
    const auto folders = FrameFolders();
    if (check_.bucket) {
      if (const auto look = FramesWrittenSince(*check_.bucket, 0, 1)) bucket_begun_ = look->now;
    }
    report_.Doing("a prompt of about " + std::to_string(tokens_) + " tokens that nobody knows, to " + first);
    cold_ = Ask(first, "cold");
    if (!cold_) return result_;
    Cold(first);
    if (!WaitUntilSaved(first)) return result_;
    TellFrames(folders);
    if (bucket_begun_ != 0) TellObjects();
    for (size_t i = 0; i < check_.instances.size() && !stop_; ++i) {
      const std::string& url = check_.instances[i];
      report_.Doing("the same to " + url);
      if (const auto answer = Ask(url, Id(i))) Judge(Id(i), i == 0 ? url + " again" : url, url, *answer);
    }
    if (!check_.router.empty()) Router();
    return result_;
  }

 private:
  static std::string Id(size_t instance) {
    return instance == 0 ? "same_instance" : "instance_" + std::to_string(instance + 1);
  }

  void Add(const std::string& name, Severity severity, std::string what, std::string remedy = "",
           Figures figures = {}) {
    report_.Add({"sharing." + name, severity, std::move(what), std::move(remedy), std::move(figures)});
  }

  Reply Call(const std::string& method, const std::string& url, const Json* body = nullptr) {
    auto bytes = std::make_shared<std::string>(body == nullptr ? "" : body->dump());
    HttpRequest request{
        .method = method, .url = url, .owner = bytes, .deadline = steady_clock::now() + check_.answer_max};
    if (body != nullptr) {
      request.headers.emplace_back("Content-Type: application/json");
      request.body = {std::as_bytes(std::span(*bytes))};
    }
    if (!check_.api_key.empty()) request.headers.push_back("Authorization: Bearer " + check_.api_key);
    std::promise<Reply> end;
    const auto begin = steady_clock::now();
    http_.Start(std::move(request), [&](HttpResponse& response) {
      Reply reply{.status = response.status, .body = Json::parse(response.text, nullptr, false)};
      if (response.failure != HttpFailure::kNone) reply.trouble = response.why.empty() ? "no answer" : response.why;
      reply.ms = std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
      end.set_value(std::move(reply));
    });
    return end.get_future().get();
  }

  // Every server answers, takes our key, and serves the same model.
  bool Reach() {
    std::vector<std::string> urls = check_.instances;
    if (!check_.router.empty()) urls.push_back(check_.router);
    uint64_t context = 0;
    bool good = true;
    for (const std::string& url : urls) {
      report_.Doing("asking " + url + " for its models");
      const Reply reply = Call("GET", url + "/v1/models");
      const std::string model = TextAt(reply.body, "/data/0/id");
      if (!reply.trouble.empty()) {
        Add("reach", Severity::kProblem, url + ": " + reply.trouble, "start it, or correct host and port");
        good = false;
      } else if (reply.status == 401 || reply.status == 403) {
        Add("reach", Severity::kProblem,
            url + " answers " + std::to_string(reply.status) + ": it wants another API key",
            "set VLLM_API_KEY to the key that it was started with");
        good = false;
      } else if (reply.status != 200 || model.empty()) {
        Add("reach", Severity::kProblem,
            url + "/v1/models answers " + std::to_string(reply.status) + " and names no model",
            "name an OpenAI-compatible server, without /v1");
        good = false;
      } else if (!model_.empty() && model != model_) {
        Add("reach", Severity::kProblem, url + " serves " + model + ", " + urls.front() + " serves " + model_,
            "instances share KV of one model only: serve the same");
        good = false;
      } else {
        model_ = model;
        const uint64_t said = NumberAt(reply.body, "/data/0/max_model_len");
        if (said != 0) context = context == 0 ? said : std::min(context, said);
        Add("reach", Severity::kOk, url + " serves " + model);
      }
    }
    // A word may become two tokens.
    tokens_ =
        static_cast<uint32_t>(std::min<uint64_t>(check_.prompt_tokens, (context == 0 ? kContextDefault : context) / 2));
    return good;
  }

  std::string MakePrompt() {
    const uint64_t seed = check_.seed != 0 ? check_.seed : std::random_device{}() | uint64_t{1} << 32;
    std::mt19937_64 random(seed);
    std::string prompt = "Report " + std::to_string(seed) + ":";
    for (uint32_t i = 0; i < tokens_; ++i) prompt += std::string(" ") + kWords[random() % kWords.size()];
    return prompt + "\n\nThe report in one word:";
  }

  Json Body(const std::string& salt = "") const {
    Json body = {{"model", model_}, {"prompt", prompt_}, {"max_tokens", kAnswerTokens}, {"temperature", 0}};
    if (!salt.empty()) body["cache_salt"] = salt;
    return body;
  }

  // Nothing, and a problem, if it does not answer.
  std::optional<Answer> Ask(const std::string& url, const std::string& id, const std::string& salt = "") {
    const Json body = Body(salt);
    const Reply reply = Call("POST", url + "/v1/completions", &body);
    if (!reply.trouble.empty() || reply.status != 200) {
      std::string said = reply.trouble.empty() ? TextAt(reply.body, "/error/message") : reply.trouble;
      Add(id, Severity::kProblem,
          url + "/v1/completions: " + (reply.status == 0 ? "" : std::to_string(reply.status) + " ") + said,
          "look at its log; does a short request work?");
      return std::nullopt;
    }
    Answer answer{.text = TextAt(reply.body, "/choices/0/text"),
                  .prompt_tokens = NumberAt(reply.body, "/usage/prompt_tokens"),
                  .cached_tokens = NumberAt(reply.body, "/usage/prompt_tokens_details/cached_tokens"),
                  .miss_reason = TextAt(reply.body, "/usage/terrace/miss_reason"),
                  .ms = reply.ms};
    const Json::json_pointer tiers("/usage/terrace/cached_by_tier");
    if (reply.body.contains(tiers)) {
      for (const auto& [tier, tokens] : reply.body[tiers].items()) {
        if (!tokens.is_number_unsigned() || tokens == 0u) continue;
        answer.by_tier += (answer.by_tier.empty() ? "" : ", ") + tier + " " + tokens.dump();
        if (tier == "shared_fs" || tier == "s3") answer.from_below += tokens.get<uint64_t>();
      }
    }
    return answer;
  }

  void Cold(const std::string& url) {
    if (cold_->cached_tokens == 0 && cold_->prompt_tokens > 0) {
      result_.prefill_tokens_per_s = static_cast<double>(cold_->prompt_tokens) / (cold_->ms / 1000);
    }
    Add("cold", Severity::kOk,
        url + " computed " + std::to_string(cold_->prompt_tokens - cold_->cached_tokens) + " of " +
            std::to_string(cold_->prompt_tokens) + " tokens, answered in " + MsText(cold_->ms),
        "",
        {{"prompt_tokens", static_cast<double>(cold_->prompt_tokens)},
         {"cached_tokens", static_cast<double>(cold_->cached_tokens)},
         {"answer_ms", cold_->ms}});
  }

  uint64_t PendingSaves(const std::string& url, const Json& body) {
    return NumberAt(Call("POST", url + "/terrace/lookup", &body).body, "/pending_saves");
  }

  // The first instance that does not see all that is expected, and what it sees; "": none. The writer itself finds it
  // nearer, in its own memory.
  std::string FirstWithout(const std::string& writer, const Json& body, uint64_t& seen) {
    for (const std::string& url : check_.instances) {
      const Json found = Call("POST", url + "/terrace/lookup", &body).body;
      seen = url == writer ? NumberAt(found, "/tokens")
                           : NumberAt(found, "/cached_by_tier/shared_fs") + NumberAt(found, "/cached_by_tier/s3");
      if (seen < expected_) return url;
    }
    return "";
  }

  // Until every instance sees all whole chunks on a shared tier; for servers that do not tell, a moment.
  bool WaitUntilSaved(const std::string& writer) {
    const Json body = Body();
    const Reply first = Call("POST", writer + "/terrace/lookup", &body);
    const uint64_t chunk = NumberAt(first.body, "/chunk");
    if (first.status != 200 || chunk == 0) {
      report_.Doing("no /terrace/lookup there: giving it " + std::to_string(kUnseenWait.count()) + " s to save");
      for (const auto end = steady_clock::now() + kUnseenWait; steady_clock::now() < end && !stop_;) Pause();
      return true;
    }
    expected_ = cold_->prompt_tokens == 0 ? 0 : (cold_->prompt_tokens - 1) / chunk * chunk;
    if (expected_ == 0) {
      Add("saved", Severity::kProblem, "the prompt has no whole chunk of " + std::to_string(chunk) + " tokens",
          "ask with --prompt-tokens " + std::to_string(4 * chunk));
      return false;
    }
    report_.Doing("waiting until all see " + std::to_string(expected_) + " tokens on shared storage");
    const auto begin = steady_clock::now();
    uint64_t pending = PendingSaves(writer, body);
    while (pending > 0 && !stop_ && steady_clock::now() - begin < check_.saved_max) {
      Pause();
      pending = PendingSaves(writer, body);
    }
    uint64_t seen = 0;
    std::string laggard = FirstWithout(writer, body, seen);
    const auto saved = steady_clock::now();
    while (pending == 0 && !laggard.empty() && !stop_ && steady_clock::now() - saved < check_.seen_max) {
      Pause();
      laggard = FirstWithout(writer, body, seen);
    }
    const double ms = std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
    if (pending > 0) {
      Add("saved", Severity::kProblem,
          writer + " still has " + std::to_string(pending) + " saves to do after " + MsText(ms),
          "its storage is slow or failing: terrace doctor with its --shared or --s3-bucket, and its /health");
      return false;
    }
    if (!laggard.empty()) {
      Add("saved", Severity::kProblem,
          laggard + " sees " + std::to_string(seen) + " of " + std::to_string(expected_) +
              " tokens on shared storage after " + MsText(ms),
          "give all instances the same --shared (or bucket and --s3-prefix), weights, --kv-type and --chunk; look at "
          "its "
          "/health");
      return true;  // The answers will say more.
    }
    Add("saved", Severity::kOk, "all of it is saved and seen by all, " + MsText(ms) + " after the answer", "",
        {{"visible_ms", ms}, {"tokens", static_cast<double>(expected_)}});
    return true;
  }

  // When names came or went in each folder of frames. A new frame changes its folder's time, by whatever clock.
  std::map<std::string, std::filesystem::file_time_type> FrameFolders() const {
    std::map<std::string, std::filesystem::file_time_type> folders;
    std::error_code error;
    if (check_.shared_directory.empty()) return folders;
    for (std::filesystem::directory_iterator at(check_.shared_directory + "/frames", error), end; !error && at != end;
         at.increment(error)) {
      std::error_code none;
      folders[at->path().filename().string()] = std::filesystem::last_write_time(at->path(), none);
    }
    return folders;
  }

  void TellFrames(const std::map<std::string, std::filesystem::file_time_type>& before) {
    if (check_.shared_directory.empty()) return;
    size_t changed = 0;
    for (const auto& [name, time] : FrameFolders()) {
      const auto was = before.find(name);
      if (was == before.end() || was->second != time) ++changed;
    }
    Figures figures = {{"folders", static_cast<double>(changed)}};
    if (changed > 0) {
      Add("frames", Severity::kOk,
          "frames appeared in " + std::to_string(changed) + " folders of " + check_.shared_directory + "/frames", "",
          std::move(figures));
    } else {
      Add("frames", Severity::kNote, "no frame was seen to appear in " + check_.shared_directory + "/frames",
          "do the instances have the same --shared? An NFS client may show it a minute later", std::move(figures));
    }
  }

  void TellObjects() {
    const std::string where = check_.bucket->endpoint.Describe();
    const auto written = FramesWrittenSince(*check_.bucket, bucket_begun_, kNamesMax);
    if (!written) {
      Add("objects", Severity::kProblem, written.error().what, "look at its server: a moment ago it could be listed");
      return;
    }
    Figures figures = {{"objects", static_cast<double>(written->frames)}};
    if (written->frames > 0) {
      Add("objects", Severity::kOk, std::to_string(written->frames) + " frames appeared in " + where, "",
          std::move(figures));
    } else if (!written->complete) {
      Add("objects", Severity::kOk, "no new frame among the first " + std::to_string(kNamesMax) + " in " + where, "",
          std::move(figures));
    } else {
      Add("objects", Severity::kNote, "no frame was seen to appear in " + where,
          "do the instances have the same bucket and --s3-prefix?", std::move(figures));
    }
  }

  void Judge(const std::string& id, const std::string& who, const std::string& url, const Answer& answer) {
    Figures figures = {{"cached_tokens", static_cast<double>(answer.cached_tokens)},
                       {"prompt_tokens", static_cast<double>(answer.prompt_tokens)},
                       {"answer_ms", answer.ms},
                       {"cold_ms", cold_->ms}};
    if (!answer.by_tier.empty()) figures.emplace_back("cached_by_tier", answer.by_tier);
    const std::string what = who + ": " + std::to_string(answer.cached_tokens) + " of " +
                             std::to_string(answer.prompt_tokens) + " tokens from the cache" +
                             (answer.by_tier.empty() ? "" : " (" + answer.by_tier + ")") + ", answered in " +
                             MsText(answer.ms) + " instead of " + MsText(cold_->ms);
    // What a server that does not name its chunks must at least find: half.
    const uint64_t enough = expected_ > 0 ? expected_ : answer.prompt_tokens / 2;
    if (answer.cached_tokens < enough || answer.cached_tokens == 0) {
      Add(id, Severity::kProblem, what + (answer.miss_reason.empty() ? "" : "; the rest missed: " + answer.miss_reason),
          "give all instances the same shared storage, weights, --kv-type and --chunk; docs/operate/troubleshoot.md "
          "has "
          "each reason of a miss",
          std::move(figures));
      return;
    }
    if (answer.text == cold_->text) {
      Add(id, Severity::kOk, what + ", same text", "", std::move(figures));
      return;
    }
    // Rounding differs between engines and batches. Ask the same server without a cache: then it is not the cache.
    const auto fresh = Ask(url, id, "doctor-" + std::to_string(std::random_device{}()));
    if (fresh && fresh->text == answer.text) {
      Add(id, Severity::kNote, what + "; its text differs from the first instance's, with the cache and without",
          "the instances compute differently (hardware, threads, build): it is not the cache", std::move(figures));
    } else if (fresh) {
      Add(id, Severity::kProblem, what + ", and its text differs from what it answers without a cache",
          "on an idle terrace serve --strict this must not happen: report it. Under load, or without --strict, engines "
          "round differently: run it again on idle instances",
          std::move(figures));
    }
  }

  void Router() {
    const size_t turns = kRouterTurns * std::max<size_t>(check_.instances.size(), 1);
    for (size_t i = 0; i < turns && !stop_; ++i) {
      report_.Doing("the same through " + check_.router + ", " + std::to_string(i + 1) + " of " +
                    std::to_string(turns));
      const std::string id = "router_" + std::to_string(i + 1);
      const auto answer = Ask(check_.router, id);
      if (!answer) return;
      Judge(id, check_.router + " (router)", check_.router, *answer);
    }
  }

  void Pause() const {
    std::promise<void> never;
    never.get_future().wait_for(kPause);
  }

  const SharingCheck& check_;
  const std::atomic<bool>& stop_;
  Report& report_;
  HttpClient http_;
  std::string model_;
  uint32_t tokens_ = 0;
  std::string prompt_;
  std::optional<Answer> cold_;
  uint64_t expected_ = 0;     // Tokens that all must find; 0: not known.
  int64_t bucket_begun_ = 0;  // By its server's clock; 0: there is none, or it does not say.
  SharingResult result_;
};

}  // namespace

SharingResult CheckSharing(const SharingCheck& check, const std::atomic<bool>& stop, Report& report) {
  return Check(check, stop, report).Run();
}

}  // namespace terrace::doctor
