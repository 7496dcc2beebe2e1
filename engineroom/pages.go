package engineroom

// all are the pages, in the order of the navigation.
func (room *Room) all() []page {
	return room.withReplica(room.withPause([]page{
		room.overviewPage(), room.activityPage(), room.auditPage(),
		room.tracesPage(), room.tracePage(),
		room.executionsPage(), room.executionPage(), room.threadsPage(), room.threadPage(),
		room.approvalsPage(), room.approvalPage(),
		room.agentsPage(), room.agentPage(),
		room.skillsPage(), room.skillPage(),
		room.automationsPage(), room.automationPage(),
		room.objectivesPage(), room.objectivePage(), room.memoryPage(), room.memoryEntryPage(),
		room.deliveriesPage(), room.deliveryPage(), room.outgoingPage(), room.messagePage(),
		room.spendPage(),
		room.lanesPage(), room.operatePage(),
	}))
}
