// SPDX-FileCopyrightText: The holdfast authors
// SPDX-License-Identifier: Apache-2.0

#include "holdfast/error.hpp"

#include "support/runtime.hpp"

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using holdfast::ContractError;
using holdfast::CudaError;
using holdfast::OutOfMemory;
using holdfast::Reason;
using holdfast::RefitError;
using holdfast::Rule;
using holdfast::throw_on_error;
using holdfast::throw_unless;

const std::vector<std::pair<Rule, std::string>> kRules{
    {Rule::null_pointer, "null_pointer"},
    {Rule::unsupported_shape, "unsupported_shape"},
    {Rule::size_overflow, "size_overflow"},
    {Rule::shape_mismatch, "shape_mismatch"},
    {Rule::type_mismatch, "type_mismatch"},
    {Rule::device_mismatch, "device_mismatch"},
    {Rule::not_contiguous, "not_contiguous"},
    {Rule::misaligned, "misaligned"},
    {Rule::read_only, "read_only"},
    {Rule::source_overlaps_target, "source_overlaps_target"},
    {Rule::overlapping, "overlapping"},
    {Rule::invalid_parameter, "invalid_parameter"},
    {Rule::not_allocated, "not_allocated"},
    {Rule::address_taken, "address_taken"},
    {Rule::already_allocated, "already_allocated"},
    {Rule::allocation_in_capture, "allocation_in_capture"},
    {Rule::refit_in_capture, "refit_in_capture"},
    {Rule::order_in_capture, "order_in_capture"},
    {Rule::moved_from, "moved_from"},
};

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

template <class Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Error, RulesAreNamedAsTheyAreSpelt) {
  for (const auto& [rule, name] : kRules) EXPECT_EQ(to_string(rule), name);
}

TEST(Error, EveryRuleOfTheEnumerationHasANameOfItsOwn) {
  std::set<std::string> names;
  int rule = 0;
  while (std::string(to_string(static_cast<Rule>(rule))) != "unknown") {
    names.insert(to_string(static_cast<Rule>(rule++)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(rule));
  EXPECT_EQ(names.size(), kRules.size()) << "a rule that this test does not know";
}

TEST(Error, ReasonsAreNamedAsTheyAreSpelt) {
  EXPECT_STREQ(to_string(Reason::busy), "busy");
  EXPECT_STREQ(to_string(Reason::unset), "unset");
}

TEST(Error, ValuesOutsideTheEnumerationsAreUnknown) {
  EXPECT_STREQ(to_string(static_cast<Rule>(255)), "unknown");
  EXPECT_STREQ(to_string(static_cast<Reason>(255)), "unknown");
}

TEST(Error, ABrokenExpectationThrowsItsRule) {
  for (const auto& [rule, name] : kRules) {
    try {
      throw_unless(false, rule, "text");
      ADD_FAILURE() << name << " was not thrown";
    } catch (const ContractError& error) {
      EXPECT_EQ(error.rule(), rule);
    }
  }
}

TEST(Error, AKeptExpectationThrowsNothing) {
  EXPECT_NO_THROW(throw_unless(true, Rule::moved_from, "text"));
}

TEST(Error, AContractMessageHasTextCallSiteAndRule) {
  int line = 0;
  const std::string message = message_of([&line] {
    line = __LINE__ + 1;
    throw_unless(false, Rule::misaligned, "buffer 'b': odd");
  });
  EXPECT_TRUE(contains(message, "buffer 'b': odd")) << message;
  EXPECT_TRUE(contains(message, "error_test.cpp:" + std::to_string(line))) << message;
  EXPECT_TRUE(contains(message, "[misaligned]")) << message;
}

TEST(Error, TextMayBeAnythingThatIsOrBuildsAString) {
  const auto message = [](const auto& text) {
    return message_of([&] { throw_unless(false, Rule::read_only, text); });
  };
  const char* pointer = "the text";
  EXPECT_TRUE(contains(message("the text"), "the text ("));
  EXPECT_TRUE(contains(message(pointer), "the text ("));
  EXPECT_TRUE(contains(message(std::string("the text")), "the text ("));
  EXPECT_TRUE(contains(message(std::string_view("the text, cut off").substr(0, 8)), "the text ("));
  EXPECT_TRUE(contains(message([] { return std::string("the text"); }), "the text ("));
  EXPECT_TRUE(contains(message([] { return "the text"; }), "the text ("));
}

TEST(Error, TextIsBuiltOnceForABrokenExpectation) {
  int built = 0;
  EXPECT_THROW(throw_unless(false, Rule::read_only, [&] { return std::to_string(++built); }),
               ContractError);
  EXPECT_EQ(built, 1);
}

TEST(Error, TextIsNotBuiltForAKeptExpectation) {
  int built = 0;
  throw_unless(true, Rule::read_only, [&] { return std::to_string(++built); });
  EXPECT_EQ(built, 0);
}

TEST(Error, OnlyTextIsAcceptedAsText) {
  static_assert(holdfast::MessageText<std::string>);
  static_assert(holdfast::MessageText<const char*>);
  static_assert(!holdfast::MessageText<int>);
  static_assert(!holdfast::MessageText<int (*)()>);
}

TEST(Error, ContractErrorsAreLogicErrorsAndTheOthersRuntimeErrors) {
  static_assert(std::is_base_of_v<std::logic_error, ContractError>);
  static_assert(std::is_base_of_v<std::runtime_error, RefitError>);
  static_assert(std::is_base_of_v<std::runtime_error, CudaError>);
  static_assert(std::is_base_of_v<CudaError, OutOfMemory>);
}

TEST(Error, ARefitErrorKeepsReasonAndMessage) {
  const RefitError error(Reason::busy, "set 'policy' is busy");
  EXPECT_EQ(error.reason(), Reason::busy);
  EXPECT_STREQ(error.what(), "set 'policy' is busy");
}

// --- throw_on_error(), which reads and clears the thread's last error

class CudaCheck : public test::Cuda {
 protected:
  /// Leaves cudaErrorInvalidDevice behind as the thread's last error.
  static void leave_invalid_device() { ASSERT_EQ(cudaSetDevice(1 << 20), cudaErrorInvalidDevice); }
};

TEST_F(CudaCheck, ThrowsNothingForSuccess) { EXPECT_NO_THROW(throw_on_error(cudaSuccess, "text")); }

TEST_F(CudaCheck, TextIsNotBuiltForSuccess) {
  int built = 0;
  throw_on_error(cudaSuccess, [&] { return std::to_string(++built); });
  EXPECT_EQ(built, 0);
}

TEST_F(CudaCheck, TextIsBuiltOnceForAFailure) {
  int built = 0;
  EXPECT_THROW(throw_on_error(cudaErrorInvalidValue, [&] { return std::to_string(++built); }),
               CudaError);
  EXPECT_EQ(built, 1);
}

TEST_F(CudaCheck, AFailureThrowsItsCode) {
  for (const cudaError_t code :
       {cudaErrorInvalidValue, cudaErrorInvalidDevice, cudaErrorNotSupported,
        cudaErrorStreamCaptureUnsupported, cudaErrorUnknown}) {
    try {
      throw_on_error(code, "text");
      ADD_FAILURE() << code << " was not thrown";
    } catch (const OutOfMemory&) {
      ADD_FAILURE() << code << " is not a lack of memory";
    } catch (const CudaError& error) {
      EXPECT_EQ(error.code(), code);
    }
  }
}

TEST_F(CudaCheck, ALackOfMemoryThrowsOutOfMemory) {
  try {
    throw_on_error(cudaErrorMemoryAllocation, "text");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.code(), cudaErrorMemoryAllocation);
  }
}

TEST_F(CudaCheck, AMessageHasTextCallSiteNumberAndBothNamesOfTheError) {
  const int line = __LINE__ + 2;
  const std::string message =
      message_of([] { throw_on_error(cudaErrorInvalidDevice, "freeing 'b'"); });
  EXPECT_TRUE(contains(message, "freeing 'b'")) << message;
  EXPECT_TRUE(contains(message, "error_test.cpp:" + std::to_string(line))) << message;
  EXPECT_TRUE(contains(message, "cudaErrorInvalidDevice")) << message;
  EXPECT_TRUE(contains(message, "(101)")) << message;  // the number in cudaError_t
  EXPECT_TRUE(contains(message, cudaGetErrorString(cudaErrorInvalidDevice))) << message;
}

TEST_F(CudaCheck, AFailureDoesNotStayBehindAsLastError) {
  leave_invalid_device();
  EXPECT_THROW(throw_on_error(cudaErrorInvalidDevice, "text"), CudaError);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaCheck, AFailureLeavesTheLastErrorOfAnotherCall) {
  leave_invalid_device();
  EXPECT_THROW(throw_on_error(cudaErrorInvalidValue, "text"), CudaError);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST_F(CudaCheck, SuccessLeavesTheLastErrorOfAnotherCall) {
  leave_invalid_device();
  throw_on_error(cudaSuccess, "text");
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST_F(CudaCheck, SucceededTellsFailureFromSuccessAndLeavesNoError) {
  EXPECT_TRUE(holdfast::detail::succeeded(cudaSuccess));
  EXPECT_FALSE(holdfast::detail::succeeded(cudaSetDevice(1 << 20)));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaCheck, SucceededLeavesTheLastErrorOfAnotherCall) {
  leave_invalid_device();
  EXPECT_TRUE(holdfast::detail::succeeded(cudaSuccess));
  EXPECT_FALSE(holdfast::detail::succeeded(cudaErrorInvalidValue));
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

}  // namespace
