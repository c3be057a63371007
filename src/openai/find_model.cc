#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "openai/errors.h"
#include "openai/parse.h"

namespace terrace::openai {
namespace {

// Takes the events of the parser; false stops it.
class ModelFinder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  enum class Trouble { kNone, kOtherType, kTwice, kNoObject, kNoJson };

  bool null() override { return at_model_ ? Found({}) : Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t) override { return Value(); }
  bool number_float(number_float_t, const string_t&) override { return Value(); }
  bool binary(binary_t&) override { return Value(); }
  bool string(string_t& text) override { return at_model_ ? Found(std::move(text)) : Value(); }
  bool start_object(size_t) override {
    if (at_model_) return Stop(Trouble::kOtherType);
    return ++depth_, true;
  }
  bool start_array(size_t) override { return Value() && (++depth_, true); }
  bool key(string_t& name) override {
    at_model_ = depth_ == 1 && name == "model";
    return !at_model_ || !found_ || Stop(Trouble::kTwice);
  }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override {
    return Stop(found_ ? Trouble::kNone : Trouble::kNoJson);
  }

  Trouble trouble = Trouble::kNone;
  std::string model;

 private:
  bool Stop(Trouble what) {
    trouble = what;
    return false;
  }
  bool Found(std::string name) {
    model = std::move(name);
    found_ = true;
    at_model_ = false;
    return true;
  }
  // A value that is neither an object nor the model's text.
  bool Value() {
    if (at_model_) return Stop(Trouble::kOtherType);
    return depth_ > 0 || Stop(Trouble::kNoObject);
  }

  int depth_ = 0;
  bool at_model_ = false;
  bool found_ = false;
};

}  // namespace

std::variant<std::string, ApiError> FindModel(std::string_view body) {
  ModelFinder finder;
  nlohmann::json::sax_parse(body.begin(), body.end(), &finder);
  switch (finder.trouble) {
    case ModelFinder::Trouble::kNone: break;
    case ModelFinder::Trouble::kOtherType: return ApiError{.message = "'model' must be a string", .param = "model"};
    case ModelFinder::Trouble::kTwice: return GivenTwice("model");
    case ModelFinder::Trouble::kNoObject: return NotAnObject();
    case ModelFinder::Trouble::kNoJson: return ExplainBadJson(body);
  }
  return std::move(finder.model);
}

}  // namespace terrace::openai
